"""What a message says, the same on every platform. Pure: an approval status makes a card."""
