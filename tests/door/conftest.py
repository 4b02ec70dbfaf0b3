from tests.door.pumping import pump, wires

__all__ = ["pump", "wires"]
