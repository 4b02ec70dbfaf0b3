from omni_proxy.routing.inspect.requirements cimport Requirements

cpdef Requirements read_plain_body(route, bytes body)
