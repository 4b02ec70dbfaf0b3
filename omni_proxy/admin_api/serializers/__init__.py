"""The JSON and text forms of the admin API's responses."""
