"""The native build: the hot modules as C. It needs Cython, and nothing of the program."""
