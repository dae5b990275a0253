"""Conformance of ``sampler`` providers: probabilities computed row by row in float64 are the reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from trivet.roles import LogitsProcessor, Sampled, Sampler, SampleRows
from trivet.testing.suites._base import promised, require
from trivet.testing.suites._sample_rows import Row
from trivet.testing.suites._sampler_bench import KNOWN_IDS, SLOTS, VOCAB, Force, KeepsArgmax, softmax
from trivet.testing.suites._sampler_changes import SamplerChanges


class SamplerSuite(SamplerChanges):
    """Draws from logits made for the purpose. Attributes named as fields of ``SamplingParams`` say which of them the
    sampler implements."""

    # ------------------------------------------------------------------ tests

    def test_the_fields_that_are_implemented(self) -> None:
        """``fields`` names what the suite is told that it tests."""
        fields = self.bound().fields
        for name in (
            *("top_k", "top_p", "min_p", "min_tokens", "logprobs", "prompt_logprobs", "logprob_token_ids"),
            *("logit_bias", "allowed_token_ids", "bad_words"),
            *("repetition_penalty", "frequency_penalty", "presence_penalty"),
        ):
            require(
                (name in fields) == getattr(self, name),
                "fields names the parameters that are implemented; set the suite's attributes of the same names alike",
                Sampler,
                field=name,
                fields=sorted(fields),
            )

    def test_greedy(self) -> None:
        """Temperature 0 takes the likeliest token that the tokenizer knows."""
        rng = np.random.default_rng(0)
        sampler = self.bound()
        rows = []
        for slot in range(SLOTS):
            self.add(sampler, slot)
            rows.append(Row(slot, slot, self.random_logits(rng)))
            rows[-1].logits[0, KNOWN_IDS + slot % 4] = 50.0  # a padding row of the LM head
        found = self.tokens(self.draw(sampler, rows))
        expected = [[int(r.logits[0, :KNOWN_IDS].argmax())] for r in rows]
        require(
            found == expected,
            "a greedy row takes the likeliest token below tokenizer_size",
            Sampler.bind,
            found=found,
            expected=expected,
        )

    def test_padding_is_never_drawn(self) -> None:
        """Ids that the tokenizer lacks are not drawn, however likely the model finds them."""
        logits = np.zeros((1, VOCAB), np.float32)
        logits[0, KNOWN_IDS:] = 20.0
        found = self.draws(logits, 64, temperature=1.0)
        require(
            bool((found < KNOWN_IDS).all()),
            "ids from tokenizer_size on are never drawn",
            Sampler.bind,
            drawn=sorted(set(found.tolist())),
        )

    def test_the_distribution(self) -> None:
        """Draws follow the softmax of the logits divided by the temperature."""
        logits = np.full((1, VOCAB), -np.inf, np.float32)
        logits[0, :8] = np.linspace(0, 2.5, 8)
        for temperature in (0.7, 1.5):
            count = 2000
            found = np.bincount(self.draws(logits, count, temperature=temperature), minlength=VOCAB)[:8] / count
            expected = softmax(logits[0, :8].astype(np.float64) / temperature)
            error = np.abs(found - expected) / np.sqrt(expected * (1 - expected) / count)
            require(
                bool((error < 5).all()) and abs(found.sum() - 1) < 1e-9,
                "tokens are drawn with the probabilities of softmax(logits / temperature)",
                Sampler.sample,
                temperature=temperature,
                frequencies=found.round(3).tolist(),
                probabilities=expected.round(3).tolist(),
            )

    def test_a_row_depends_on_nothing_but_itself(self) -> None:
        """The same request draws the same token alone, in any batch, in any slot, and after a preemption."""
        rng = np.random.default_rng(1)
        logits = self.random_logits(rng)
        alone: list[list[int]] = []
        for position in range(6):
            sampler = self.bound()
            self.add(sampler, 0, seed=11, temperature=1.0)
            alone += self.tokens(self.draw(sampler, [Row(0, position, logits)]))
        require(
            len({t[0] for t in alone}) > 1, "the output position is part of the noise", Sampler.sample, tokens=alone
        )
        sampler = self.bound()
        order = rng.permutation(SLOTS).tolist()
        target = order[5]
        for slot in order:
            fields: dict[str, Any] = {"temperature": float(rng.choice([0.0, 0.7, 1.5]))}
            if self.top_k and rng.random() < 0.5:
                fields["top_k"] = int(rng.integers(1, 9))
            if slot != target:
                self.add(sampler, slot, seed=int(rng.integers(100)), **fields)
        for position in range(6):
            self.add(sampler, target, seed=11, temperature=1.0)
            rows = [
                Row(s, position if s == target else 3, logits if s == target else self.random_logits(rng))
                for s in order
            ]
            found = self.tokens(self.draw(sampler, rows))[5]
            require(
                found == alone[position],
                "a row's result depends on nothing but its own logits, parameters, seed and tokens",
                Sampler.sample,
                in_a_batch=found,
                alone=alone[position],
                position=position,
            )
            sampler.remove(target)

    def test_slots_are_used_again(self) -> None:
        """Nothing of a request is left in its slot when the next one enters."""
        logits = self.random_logits(np.random.default_rng(2))
        sampler = self.bound()
        best = int(logits[0, :KNOWN_IDS].argmax())
        for _ in range(3):
            self.add(sampler, 4, seed=5, temperature=2.0)
            self.draw(sampler, [Row(4, 0, logits)])
            sampler.remove(4)
            self.add(sampler, 4)
            found = self.tokens(self.draw(sampler, [Row(4, 0, logits)]))
            require(
                found == [[best]],
                "a slot's state is the request's that is in it",
                Sampler.remove,
                found=found,
                expected=best,
            )
            sampler.remove(4)

    @promised("top_k")
    def test_top_k(self) -> None:
        """Only the k likeliest tokens are drawn, and all of them."""
        logits = self.random_logits(np.random.default_rng(3), spread=0.5)
        order = np.argsort(-logits[0, :KNOWN_IDS])
        for k in (1, 2, 5):
            self.check_set(logits, set(order[:k].tolist()), f"top_k = {k}", top_k=k)

    @promised("top_p")
    def test_top_p(self) -> None:
        """The smallest set of likeliest tokens that holds the probability p, and at least the likeliest."""
        logits = self.random_logits(np.random.default_rng(4), spread=2.0)
        order = np.argsort(-logits[0, :KNOWN_IDS])
        probabilities = softmax(logits[0, :KNOWN_IDS].astype(np.float64))[order]
        for p in (0.0001, 0.3, 0.6, 0.9):
            size = int(np.searchsorted(np.cumsum(probabilities), p) + 1)
            self.check_set(logits, set(order[:size].tolist()), f"top_p = {p}", top_p=p)

    @promised("min_p")
    def test_min_p(self) -> None:
        """Tokens at least ``min_p`` times as likely as the likeliest."""
        logits = self.random_logits(np.random.default_rng(5), spread=2.0)
        probabilities = softmax(logits[0, :KNOWN_IDS].astype(np.float64))
        for p in (0.02, 0.3, 1.0):
            allowed = set(np.flatnonzero(probabilities >= p * probabilities.max()).tolist())
            self.check_set(logits, allowed, f"min_p = {p}", min_p=p)

    @promised("min_tokens")
    def test_min_tokens(self) -> None:
        """No stop token is drawn before ``min_tokens`` tokens."""
        logits = self.random_logits(np.random.default_rng(6))
        order = np.argsort(-logits[0, :KNOWN_IDS]).tolist()
        sampler = self.bound()
        self.add(sampler, 2, min_tokens=3, stop_token_ids=order[:2])
        found = [self.tokens(self.draw(sampler, [Row(2, p, logits)]))[0][0] for p in range(5)]
        expected = [order[2]] * 3 + [order[0]] * 2
        require(
            found == expected,
            "no stop token among the first min_tokens",
            Sampler.sample,
            found=found,
            expected=expected,
        )

    # ------------------------------------------------------------------ drafts

    def test_chains_of_drafts(self) -> None:
        """A draft is accepted while it is the token that the row would have drawn; then one token is drawn."""
        self.check_drafts(np.random.default_rng(7), trees=False)

    @promised("trees")
    def test_trees_of_drafts(self) -> None:
        """The accepted path, and the tokens along it, are those of the unspeculated run."""
        self.check_drafts(np.random.default_rng(8), trees=True)

    def check_drafts(self, rng: Any, *, trees: bool) -> None:
        """Random drafts, half of them right, for greedy and sampled rows."""
        for _ in range(self.examples):
            single, batch = self.bound(), self.bound()
            rows, expected, paths = [], [], []
            for slot in range(4):
                fields: dict[str, Any] = {"seed": int(rng.integers(99)), "temperature": float(slot % 2)}
                self.add(single, slot, **fields)
                self.add(batch, slot, **fields)
                count = int(rng.integers(0, 6)) if slot else 5
                row = Row(slot, int(rng.integers(9)), self.random_logits(rng, 1 + count))
                row.parents = [int(rng.integers(-1, n)) for n in range(count)] if trees else None
                parents = row.parents if row.parents is not None else list(range(-1, count - 1))
                depths = row.depths()
                right = [
                    self.tokens(self.draw(single, [Row(slot, row.position + depths[i], row.logits[i : i + 1])]))[0][0]
                    for i in range(1 + count)
                ]
                for parent in parents:
                    guess = right[1 + parent]
                    row.drafts.append(guess if rng.random() < 0.6 else (guess + 1) % KNOWN_IDS)
                tokens, path, node = [right[0]], [], -1
                while True:
                    children = [n for n in range(count) if parents[n] == node and row.drafts[n] == tokens[-1]]
                    if not children:
                        break
                    node = children[0]
                    path.append(node)
                    tokens.append(right[1 + node])
                # Equal siblings make either of them right.
                siblings = {(parents[n], row.drafts[n]) for n in range(count)}
                if len(siblings) < count:
                    row.drafts, row.parents, row.logits = [], [] if trees else None, row.logits[:1]
                    tokens, path = [right[0]], []
                rows.append(row)
                expected.append(tokens)
                paths.append(path)
            sampled = self.draw(batch, rows)
            found = self.tokens(sampled)
            require(
                found == expected,
                "drafts are accepted while they equal what the row would have drawn, then one token is drawn",
                Sampled,
                found=found,
                expected=expected,
                drafts=[(r.drafts, r.parents) for r in rows],
            )
            if trees and any(r.drafts for r in rows):
                given = None if sampled.path is None else [sampled.path.row(i).tolist() for i in range(len(rows))]
                require(
                    given == paths, "path has the accepted nodes of every row", Sampled, found=given, expected=paths
                )

    # ------------------------------------------------------------------ masks and faults

    @promised("bitmasks")
    def test_bitmasks(self) -> None:
        """A grammar's bits leave only their tokens, on draft rows too; rows without a grammar are untouched."""
        rng = np.random.default_rng(9)
        sampler = self.bound()
        rows, expected = [], []
        for slot in range(SLOTS):
            self.add(sampler, slot, seed=slot)
            logits = self.random_logits(rng, 2)
            bits = rng.random((2, VOCAB)) < 0.2
            bits[:, slot] = True
            if slot % 3 == 0:
                rows.append(Row(slot, 0, logits[:1]))
                expected.append([int(logits[0, :KNOWN_IDS].argmax())])
                continue
            masked = np.where(bits, logits, -np.inf)[:, :KNOWN_IDS]
            first = int(masked[0].argmax())
            rows.append(Row(slot, 0, logits, [first], bits=bits))
            expected.append([first, int(masked[1].argmax())])
        found = self.tokens(self.draw(sampler, rows))
        require(found == expected, "only tokens whose bit is set are drawn", SampleRows, found=found, expected=expected)

    def test_nan_logits(self) -> None:
        """A row of NaN fails with its request; its neighbours do not notice."""
        rng = np.random.default_rng(10)
        sampler = self.bound()
        rows = []
        for slot in range(5):
            self.add(sampler, slot, seed=slot, temperature=float(slot % 2))
            rows.append(Row(slot, 0, self.random_logits(rng)))
        good = self.tokens(self.draw(sampler, rows))
        rows[2].logits[0, 7] = np.nan
        self.check_failure(self.draw(sampler, rows), good, 2, "nan")

    @promised("bitmasks")
    def test_nothing_left_to_draw(self) -> None:
        """A row whose every token is masked fails with a message; its neighbours do not notice."""
        rng = np.random.default_rng(11)
        sampler = self.bound()
        rows = []
        for slot in range(5):
            self.add(sampler, slot, seed=slot, temperature=float(slot % 2))
            rows.append(Row(slot, 0, self.random_logits(rng), bits=np.ones((1, VOCAB), np.bool_)))
        good = self.tokens(self.draw(sampler, rows))
        rows[3].bits = np.zeros((1, VOCAB), np.bool_)
        self.check_failure(self.draw(sampler, rows), good, 3, "")

    # ------------------------------------------------------------------ logprobs

    @promised("logprobs")
    def test_logprobs(self) -> None:
        """Logprobs are the raw model's: the drawn token first, then the likeliest, with the drawn one's rank."""
        rng = np.random.default_rng(12)
        sampler = self.bound()
        rows = []
        for slot, count in enumerate((0, 1, 3, 5)):
            self.add(sampler, slot, seed=slot, temperature=1.5, logprobs=count)
            rows.append(Row(slot, 2, self.random_logits(rng, 2)))
        self.add(sampler, 9)
        rows.append(Row(9, 0, self.random_logits(rng)))
        for row in rows[:4]:
            drawn = self.tokens(self.draw(sampler, [Row(row.slot, 2, row.logits[:1])]))[0][0]
            row.drafts = [drawn]
        kept = [row.logits.copy() for row in rows]
        sampled = self.draw(sampler, rows)
        tokens = self.tokens(sampled)
        reported = {entry.row: entry.values for entry in sampled.logprobs}
        require(sorted(reported) == [0, 1, 2, 3], "rows that ask for logprobs get them", Sampled, rows=sorted(reported))
        for index, count in enumerate((0, 1, 3, 5)):
            self.check_logprobs(reported[index], kept[index][: len(tokens[index])], tokens[index], count)

    @promised("prompt_logprobs")
    def test_prompt_logprobs(self) -> None:
        """Rows that exist for prompt logprobs are reported about the tokens that follow them, and not sampled."""
        rng = np.random.default_rng(13)
        sampler = self.bound()
        self.add(sampler, 3, prompt_logprobs=2)
        self.add(sampler, 5)
        logits, extra = self.random_logits(rng), self.random_logits(rng, 3)
        kept = extra.copy()
        sampled = self.draw(sampler, [Row(5, 0, logits)], [(3, 2, extra)])
        require(
            len(self.tokens(sampled)) == 1, "prompt rows are not sampled", SampleRows, accepted=len(sampled.accepted)
        )
        chunks = [(c.slot, c.epoch, c.start) for c in sampled.prompt_logprobs]
        require(
            chunks == [(3, 103, 2)],
            "a chunk repeats its row's slot, epoch and start",
            "trivet.result.PromptLogprobs",
            chunks=chunks,
        )
        # The prompt of every request here is 0, 1, 2, 3, 4.
        self.check_logprobs(sampled.prompt_logprobs[0].values, kept, [2, 3, 4], 2)

    # ------------------------------------------------------------------ logits processors

    @promised("processors")
    def test_logits_processors(self) -> None:
        """Processors are told of rows, see those that want them, and change what is drawn."""
        rng = np.random.default_rng(14)
        force = Force(self, 33)
        sampler = self.bound(force)
        rows = []
        for slot in range(6):
            self.add(sampler, slot, extra_args={"force": True} if slot % 2 else None)
            rows.append(Row(slot, 0, self.random_logits(rng)))
        found = self.tokens(self.draw(sampler, rows))
        expected = [[33] if r.slot % 2 else [int(r.logits[0, :KNOWN_IDS].argmax())] for r in rows]
        require(
            found == expected,
            "a processor changes the rows that want it, before tokens are drawn",
            LogitsProcessor.apply,
            found=found,
            expected=expected,
        )
        for slot in range(6):
            sampler.remove(slot)
        require(
            force.removed == [1, 3, 5],
            "remove is called for requests whose add returned True",
            LogitsProcessor.remove,
            removed=force.removed,
        )

    @promised("processors")
    def test_greedy_rows_skip_processors_that_keep_the_argmax(self) -> None:
        """A greedy row is not shown to a processor that promises to keep the likeliest token."""
        rng = np.random.default_rng(15)
        keeps = KeepsArgmax(self, 33)
        sampler = self.bound(keeps)
        self.add(sampler, 0, extra_args={"force": True})
        self.add(sampler, 1, extra_args={"force": True}, temperature=1.0)
        self.draw(sampler, [Row(0, 0, self.random_logits(rng)), Row(1, 0, self.random_logits(rng))])
        require(
            keeps.seen == {1}, "greedy rows skip processors with keeps_argmax", LogitsProcessor, slots_seen=keeps.seen
        )
