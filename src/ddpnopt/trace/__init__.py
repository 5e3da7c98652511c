"""All that knows `nn.Module`: which modules are layers, the hooks on them, and the recorded pass and its replays."""
