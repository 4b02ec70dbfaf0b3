"""Active health checks, removal of ejected workers, and the list of uploaded voices."""
