"""`offload-engine doctor`: what a bug report needs to say of a machine, what is wrong with it and how to mend it."""

from offload_engine.doctor.facts import Fact, examine
from offload_engine.doctor.page import main

__all__ = ["Fact", "examine", "main"]
