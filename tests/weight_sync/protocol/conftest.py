from hypothesis import settings

# A busy machine is slow, so hypothesis must not fail for slowness.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
