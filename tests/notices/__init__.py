"""What people are told: the words, and what is remembered of messages."""
