"""What RoutePack raises when an input cannot be used.

Every error names the option or file, the value, the limit and the remedy. All are
``ValueError`` so that code which knows nothing of RoutePack can still catch them.
"""


class RoutePackError(ValueError):
    """An input that RoutePack cannot use; the message says what to change."""

    second_hand = False
    """Whether all that is known is that another rank has an error, or is gone: that rank's own error tells more."""


class ConfigError(RoutePackError):
    """A config names something that does not exist, or gives it a value it cannot have."""


class TraceError(RoutePackError):
    """Recorded routing, a demand or a plan file that contradicts itself or cannot be read."""


class InfeasibleError(RoutePackError):
    """A window that no plan can satisfy, such as a sequence longer than a microbatch."""


class PlanError(RoutePackError):
    """A plan that does not fit its trace, or that is not what its own figures say."""


class RankLostError(RoutePackError):
    """Another rank ended, or no longer answers, while all had to work together; the message says at what."""

    second_hand = True


class CheckpointError(RoutePackError):
    """A checkpoint that cannot be written, or does not fit the model that it is loaded into."""


def heard(error: RoutePackError) -> RoutePackError:
    """*error*, marked as second-hand: a rank raises it because another rank has one."""
    error.second_hand = True
    return error
