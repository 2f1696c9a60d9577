"""Plans of post-training: rollouts, training, and weights that move between their layouts every step."""
