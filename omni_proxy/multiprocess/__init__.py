"""Several data-plane processes behind one port, and the main process that manages them.

The main process (admin API, health checks, configuration store, weight sync) owns the listening
sockets, determines the health of workers and sends every data-plane process snapshots of the fleet
and the configuration. A data-plane process routes by its newest snapshot and reports results of
requests. Requests in flight are counted in memory that all processes share. With `[server]
processes = 1` none of this runs: the main process serves the requests itself.
"""
