"""Screenshots of the dashboard for the documentation."""
