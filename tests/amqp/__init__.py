"""Tests of `relay.amqp`."""
