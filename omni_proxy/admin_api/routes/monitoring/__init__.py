"""Routes that dashboards, charts and scrapers of metrics read."""
