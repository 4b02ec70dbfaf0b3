"""Active health checks, outlier ejection, and the list of uploaded voices."""
