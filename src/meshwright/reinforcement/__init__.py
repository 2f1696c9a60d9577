"""Reinforcement learning with a plan: rollouts by the engine, rewards, and updates by the training step."""
