"""Every table and figure of the paper, each by one command: `ddpnopt reproduce ITEM`."""
