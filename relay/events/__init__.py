"""WHAT HAPPENED: the document that Azure gives, what changed in it, and the CloudEvents that say so. Pure, all of it."""
