"""Chapter 12: two models in one memory: DPO with its reference model, GRPO with its rollouts."""
