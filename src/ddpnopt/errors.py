"""The errors of the package: each says what is wrong, where, and what to do."""


class DDPNOptError(Exception):
    """Base of all errors raised by ddpnopt on purpose."""


class OptionError(DDPNOptError, ValueError):
    """An option has an invalid value, or one that cannot be combined with another."""


class ModelError(DDPNOptError, ValueError):
    """The model, or the way in which its layers ran, is not supported."""


class StepError(DDPNOptError, RuntimeError):
    """`step()` was called in a state from which no step can be taken."""


class PeerError(DDPNOptError, RuntimeError):
    """Another process of data-parallel training has died or left; weights and state are as they were."""


class NonFiniteError(DDPNOptError, FloatingPointError):
    """The loss, a gradient or an update is NaN or infinite; weights and state are as they were."""


class OpenLoopWarning(UserWarning):
    """Some parameters are updated without feedback, by the base optimizer."""


class TrainingWarning(UserWarning):
    """Training does not go as it should: steps are repeated or undone, or no gradient reaches some layers."""


class UncertainLossWarning(UserWarning):
    """The loss is not known for certain: its form or its scale is a guess."""


class CheckpointError(DDPNOptError, RuntimeError):
    """A checkpoint cannot be written, read or used."""
