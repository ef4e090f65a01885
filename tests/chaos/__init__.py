"""Tests of the program that lets the world fail."""
