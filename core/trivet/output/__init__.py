"""The output stage: detokenisation, stop strings, logprobs, and the outputs that users get."""

from trivet.output.completion import Completion
from trivet.output.merge import merge_outputs
from trivet.output.stage import Output, OutputStage
from trivet.output.stops import StopFinder
from trivet.output.thread import OutputThread

__all__ = ["Completion", "Output", "OutputStage", "OutputThread", "StopFinder", "merge_outputs"]
