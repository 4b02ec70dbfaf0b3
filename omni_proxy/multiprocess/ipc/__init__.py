"""The protocol between the main process and a data-plane process: its messages and its socket."""
