"""Who may take a request, and who gets it.

Pure: a route table, the inspection of bodies, the policies, and the words for a refusal. Invariant:
the body's bytes are read here and never changed; chance comes in as an argument.
"""
