from hypothesis import settings

# A loaded machine is slow, not wrong.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
