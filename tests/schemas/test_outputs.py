from __future__ import annotations

import pickle

import pytest

from trivet_schemas.outputs import (
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)


def test_request_output_takes_the_positions_of_vllm() -> None:
    completion = CompletionOutput(0, " Paris", [12], -0.1, [{12: Logprob(-0.1, 1, " Paris")}], "stop", "\n")
    output = RequestOutput("r1", "The capital", [1, 2], None, [completion], True)
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r1", "The capital", [1, 2])
    assert output.outputs[0].finished()
    assert output.finished
    assert output.error is None
    assert pickle.loads(pickle.dumps(output)) == output


def test_a_running_completion_is_not_finished() -> None:
    assert not CompletionOutput(0, "", []).finished()


def test_outputs_have_no_room_for_misspelt_fields() -> None:
    with pytest.raises(AttributeError):
        CompletionOutput(0, "", []).txt = "x"  # type: ignore[attr-defined]


def test_durations_are_differences_of_times_and_none_until_known() -> None:
    metrics = RequestMetrics(arrival_time=1.0, first_scheduled_time=1.5, first_token_time=3.5)
    assert (metrics.queue_seconds, metrics.prefill_seconds, metrics.decode_seconds) == (0.5, 2.0, None)
    metrics.finished_time = 7.0
    assert metrics.decode_seconds == 3.5


def test_pooled_outputs_know_their_sizes() -> None:
    output = EmbeddingRequestOutput("r", EmbeddingOutput([0.6, 0.8]), [1, 2])
    assert output.outputs.hidden_size == 2
    assert output.finished
    assert ClassificationOutput([0.5, 0.5]).num_classes == 2
