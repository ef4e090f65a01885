"""What a message says, the same on every platform. Pure: statuses come in, a card comes out."""
