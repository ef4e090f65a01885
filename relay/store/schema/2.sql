-- Version 2: what chat sinks show, and the links in it.

-- One message of a chat sink, about one event or about a burst of them.
CREATE TABLE message (
  id       INTEGER PRIMARY KEY AUTOINCREMENT,
  sink     TEXT NOT NULL,
  ref      TEXT,                     -- as the platform names it; null: it was not posted yet, or cannot be named
  posted   INTEGER NOT NULL DEFAULT 0,   -- how often it was posted or edited
  code     TEXT NOT NULL,            -- shown in it, and asked for by the page behind its links
  looks    TEXT,                     -- digest of what it shows
  told     INTEGER NOT NULL,         -- position in the journal up to which its thread tells
  stale_at TEXT                      -- when time alone changes what it should show
);
CREATE INDEX message_stale ON message (sink, stale_at) WHERE stale_at IS NOT NULL;

CREATE TABLE message_about (
  sink       TEXT NOT NULL,
  occurrence INTEGER NOT NULL REFERENCES occurrence (id) ON DELETE CASCADE,
  message    INTEGER NOT NULL REFERENCES message (id) ON DELETE CASCADE,
  PRIMARY KEY (sink, occurrence)
) WITHOUT ROWID;
CREATE INDEX message_about_message ON message_about (message);
CREATE INDEX message_about_occurrence ON message_about (occurrence);

-- The links of a message to the page on which a decision is confirmed. The token itself is in the message alone.
CREATE TABLE invitation (
  token      TEXT PRIMARY KEY,       -- its SHA-256
  message    INTEGER NOT NULL REFERENCES message (id) ON DELETE CASCADE,
  occurrence INTEGER NOT NULL REFERENCES occurrence (id) ON DELETE CASCADE,
  revision   TEXT NOT NULL,
  decision   TEXT NOT NULL,          -- approve, hold, release
  wrong      INTEGER NOT NULL DEFAULT 0,   -- how often a wrong code was given with it
  at         TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX invitation_message ON invitation (message);
CREATE INDEX invitation_occurrence ON invitation (occurrence);
