"""The native build: compiles the hot modules to C. Needs Cython; imports nothing of the program."""
