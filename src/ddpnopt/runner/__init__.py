"""Many runs: what a run is, the store of their outcomes, and the processes that compute them."""
