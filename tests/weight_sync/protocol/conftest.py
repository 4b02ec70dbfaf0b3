from hypothesis import settings

# Without a deadline: an example may take long on a busy machine.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
