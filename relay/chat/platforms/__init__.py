"""The chat platforms. Each package of this folder is one; `relay.chat` is their contract."""
