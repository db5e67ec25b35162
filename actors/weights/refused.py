"""Why an engine keeps the weights that it has."""


class WeightsRefused(RuntimeError):
    """Offered weights did not arrive, or are corrupt or do not fit; the engine keeps the old ones."""


class WeightsUnfit(WeightsRefused):
    """Offered weights have other tensors than the model, or the engine computes something else with them."""
