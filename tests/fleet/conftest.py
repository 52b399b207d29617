"""Property tests take as long as the machine lets them: workers share its cores."""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
