"""Phrases of the pages with numbers that are no measurements, and why; `unmarked.py` has the rules for all others.

Code and marked figures are left out of a phrase. A phrase that is no longer in its page fails, too.
"""

from __future__ import annotations

MATHEMATICS = "mathematics"
SETTING = "set, not measured: an option, a size, the length of a run"
CONSTANT = "a number of the source"
TARGET = "what was aimed at"
COUNTED = "follows from the formula or from sizes by arithmetic"
DEFINITION = "what a word or a verdict means"

NOT_MEASURED: dict[str, dict[str, tuple[str, ...]]] = {
    "README.md": {SETTING: ("a GPT of 3.2 million parameters",)},
    "docs/api/errors.md": {SETTING: ("heading_level: 2",)},
    "docs/baselines.md": {
        SETTING: (
            "may fall to 1",
            "at 30 it falls until the end; at 50 training is slow",
            "with 10 and with 30",
            "uses 30 for DIGITS",
            "the default of 1 works well",
            "With a mu of 30",
        ),
        COUNTED: ("worth 2.8 points",),
    },
    "docs/control.md": {MATHEMATICS: ("max(1,",)},
    "docs/distributed.md": {
        SETTING: (
            "(1 unless names a loss)",
            "P positions (1, tokens, pixels)",
            "4 bytes per number, or 8 where stated",
            "a delay of 20 ms",
            "25 Gbit/s, 20 microseconds per message",
            "2e12 operations per second",
        ),
        COUNTED: (
            "| gather | 40 |",
            "| sum | 8 |",
            "| 4 b min(P",
            "| 4 R b R B |",
            "| 4 R b |",
            "| 4 abs(u_t) |",
            "2 sums | 8 R b + 16",
            "needs 4 T + 5",
            "need 4 T + 8 collectives, and 3 T + 8",
            "(16 bytes)",
            "(4 T)",
            "(4 b for each layer)",
            "the next look (8)",
            "a count (8)",
            "4 n^2 bytes",
            "4 k n + 4 k^2",
            "2 k numbers",
            "2 (W - 1) / W s bytes",
            "about 2 log2 W messages",
        ),
    },
    "docs/explained.md": {MATHEMATICS: ("map the input 1 to the output 1", "whose product is 1")},
    "docs/from-adam.md": {SETTING: ("one that starts at 1",)},
    "docs/gallery.md": {
        SETTING: ("150 steps", "learnt in 400 steps", "60 steps", "100 steps", "(of 64 new images)"),
        MATHEMATICS: ("a solution between -1 and 1",),
    },
    "docs/howto/architectures.md": {SETTING: ("Adam at 1e-3",), CONSTANT: ("33 million numbers",)},
    "docs/howto/compare.md": {SETTING: ("300 by default", "fewer than about 100")},
    "docs/howto/derivatives.md": {
        SETTING: (
            "(viscosity 0.05), two hidden layers of 32, 500 fixed points, one seed, 5 seconds",
            "500 new points",
            "about 1,000 of them are affordable",
        ),
        CONSTANT: ("no more than 1,024 in all",),
    },
    "docs/howto/frameworks.md": {SETTING: ("starts at 1, fall to 0",)},
    "docs/howto/groups.md": {SETTING: ("a factor that is 1 by default", "with 0.5 move by half")},
    "docs/howto/losses.md": {DEFINITION: ("of which many are 0 or 1",)},
    "docs/howto/schedulers.md": {SETTING: ("starts at 1 and multiplies", "ends at 0 anneals")},
    "docs/howto/tensorboard.md": {DEFINITION: ("1 where the model is right",)},
    "docs/learning-rates.md": {
        SETTING: ("within 4 points of the method's best", "half decades from 0.001 to 10,000", "from about 1 upwards"),
        DEFINITION: ("within 2 points of a method's own best",),
    },
    "docs/limits.md": {CONSTANT: ("33 million numbers",)},
    "docs/results.md": {
        SETTING: (
            "a character GPT of 3.2 million parameters",
            "in windows of 128 characters",
        ),
    },
    "docs/method.md": {
        MATHEMATICS: (
            "can exceed 1, which",
            "a constant input of 1",
            "(c_t is between 0 and 1)",
            "at most 1, while the damping stays",
            "It is 1 where the model is right",
            "1 / (3 n)^1/2",
        ),
        CONSTANT: (
            "4 million multiplications (33 million",
            "lambda starts at 1",
            "exp(-4 (a - 0.01)), between 1/1.7 and 1.1 times",
            "more than 1 % on the same points",
            "The damping d, 1 by default",
            "starts at = 1 and decays as 1 / sqrt(1 + samples / 6,400)",
            "trained by Adam at 1e-3",
        ),
        SETTING: (
            "At 0.4 and 0.6 individual runs",
            "With 16 leading directions",
            "between 0.2 and 1.5; with 0.02",
            "to after 800 (now",
            "( 1, 1.2), or 1.25 to 1.5 times as long",
            "one seed, 17 open tasks",
            "dof = 0.15 and 0.4, a damping floor of 0.3",
        ),
        "in words, after the table that it names": ("twice as fast with thin layers",),
    },
    "docs/reproduce.md": {
        SETTING: ("7 methods on 7 data sets", "of 32 (fully connected) and 128 (convolutional)"),
        DEFINITION: ("that of 95 % by Student's t", "wider, 2.2 standard errors", "a third look, 2.4"),
    },
    "docs/speed.md": {
        DEFINITION: ("its distance from 1 shows",),
        SETTING: ("grows from 8 to 2,048", "sizes up to 512", "would exceed 1 GB", "Blocks of 128"),
        TARGET: ("(1.4)", "(1.6)", "(1.8)", "(3)", "(1.9)", "(2.0)", "(target: 0.1)", "(target: 1.5)"),
        COUNTED: ("is 1.86 million multiplications", "an SGD step 4.78", "gradient: 1.39 times SGD"),
        CONSTANT: ("at least 32,768 weights", "a block of 31 MB", "up to twice as much"),
    },
    "docs/suite.md": {
        SETTING: ("multiplied by 1e-4", "on 21 tasks with two seeds"),
        DEFINITION: ("or 2 % of another metric",),
    },
    "docs/trouble.md": {
        DEFINITION: (
            "below 0.01 and growing",
            "then between 0.01 and 1 |",
            "| near 1; it may start high",
            "between 0 and 1; 0 in the first layer",
            "If it is near 1,",
        ),
        SETTING: ("so 0.001 makes", "Leave it at 1,", "starts at 1 ("),
    },
    "submissions/README.md": {
        SETTING: ("not scaled to 1)", "(commit 2c90454", "500 steps, evaluations"),
        TARGET: ("the target of 97 %",),
    },
}
