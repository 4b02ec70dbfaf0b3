from omni_proxy.routing.inspect.requirements cimport Requirements

cpdef Requirements read_usual(route, bytes body)
