from omni_proxy.fleet.registry cimport Fleet

from omni_proxy.routing.inspect.requirements cimport Requirements

cpdef pick_worker(Fleet fleet, Requirements requirements, policy, tried=*, str owner=*)
