"""What shows, on the user's own code, that a resume is exact.

comparison                                        the first difference of two values
fakes  surroundings  laboratory                   a world that is set, and processes to try it in
pieces  moving_parts  experiments  causes         a batch that is read again, and why it differs
verification  pipeline_resume  training_resume    what a user calls
random_pipelines  strategies                      for property-based tests; the last one needs Hypothesis
"""

from stateful_pipes.testing.pipeline_resume import assert_pipeline_resume
from stateful_pipes.testing.training_resume import assert_training_resume
from stateful_pipes.testing.verification import Verdict, verify

__all__ = ["Verdict", "assert_pipeline_resume", "assert_training_resume", "verify"]
