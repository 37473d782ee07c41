"""What every training run is made of, wherever its windows come from."""
