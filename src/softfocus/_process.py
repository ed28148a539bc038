"""The process that imported softfocus. A child that it forks has none of its threads."""

import os

PROCESS = os.getpid()
