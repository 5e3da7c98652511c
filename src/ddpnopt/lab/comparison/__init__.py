"""`ddpnopt compare`: several methods on one data set, as a table and a picture."""
