"""What runs in the trainer: finds the state, copies it into slots beside training, and brings it back."""
