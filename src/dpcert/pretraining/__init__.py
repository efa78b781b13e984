"""Non-private pretraining on public images, with Gaussian noise: the weights that private fine-tuning starts from."""
