"""What shows, on the user's own code, that a resume is exact.

comparison  training_resume
"""

from stateful_pipes.testing.training_resume import assert_training_resume

__all__ = ["assert_training_resume"]
