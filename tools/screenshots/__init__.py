"""Pictures of the dashboard for the documentation."""
