"""What memory connections and waiting requests hold."""
