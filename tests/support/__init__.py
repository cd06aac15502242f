"""What the tests share: inputs, layouts, the fp64 oracle, the error budget, pools of ranks, lanes."""
