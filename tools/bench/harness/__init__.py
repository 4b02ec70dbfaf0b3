"""What every measurement needs: builds, processes, sides, rounds of legs, tables and pictures."""
