-- The state file, version 1; each later file of this folder adds what its version is named after. PRAGMA user_version
-- holds the version, PRAGMA application_id marks the file as ours.

-- Whose file it is and what an operator told it: vm_id, scope, mode, last_read; probe, written to see whether it can be.
CREATE TABLE meta (
  key   TEXT PRIMARY KEY,
  value TEXT NOT NULL
) WITHOUT ROWID;

-- The audit trail. Append-only, each row's hash covers the row and the hash before it. What goes out is derived from it.
CREATE TABLE journal (
  position   INTEGER PRIMARY KEY,
  at         TEXT NOT NULL,          -- RFC 3339
  kind       TEXT NOT NULL,          -- <family>.<change> of the CloudEvent, or claim, mode
  event_key  TEXT,                   -- <eventid>, on a hub <eventid>@<scope>
  transition TEXT,                   -- of event.*: what is counted to make ids
  body       BLOB NOT NULL,          -- the CloudEvent's bytes; of claim and mode a JSON object
  hash       TEXT NOT NULL
);
CREATE INDEX journal_of_event ON journal (event_key, position) WHERE event_key IS NOT NULL;
CREATE INDEX journal_of_transition ON journal (transition) WHERE transition IS NOT NULL;
CREATE TRIGGER journal_is_append_only BEFORE UPDATE ON journal
BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;
CREATE TRIGGER journal_grows_at_its_end BEFORE INSERT ON journal
WHEN new.position <= (SELECT max(position) FROM journal)
BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;

-- Where a pruned journal begins: position and hash of the last row that was removed.
CREATE TABLE checkpoint (
  position INTEGER PRIMARY KEY,
  hash     TEXT NOT NULL,
  at       TEXT NOT NULL
);
CREATE TRIGGER journal_is_pruned_behind_a_checkpoint BEFORE DELETE ON journal
WHEN old.position > coalesce((SELECT position FROM checkpoint), 0)
BEGIN SELECT RAISE(ABORT, 'only what a checkpoint covers is removed from the journal'); END;

-- One row each time an EventId was in the document without a break. The live ones are the snapshot.
CREATE TABLE occurrence (
  id           INTEGER PRIMARY KEY AUTOINCREMENT,
  key          TEXT NOT NULL,        -- <eventid>, on a hub <eventid>@<scope>
  number       INTEGER NOT NULL,     -- the first is 1
  data         TEXT NOT NULL,        -- data of event.*, JSON
  revision     TEXT NOT NULL,
  live         INTEGER NOT NULL,
  boot_id      TEXT,                 -- of this VM when the event was not yet due nor approved
  first_seen   TEXT NOT NULL,
  last_changed TEXT NOT NULL,
  outcome      TEXT,
  told         TEXT NOT NULL,        -- id of the last event.* that told of it
  UNIQUE (key, number)
);
CREATE UNIQUE INDEX occurrence_live ON occurrence (key) WHERE live;

-- Votes, holds and releases that were accepted.
CREATE TABLE decision (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,
  approval_id TEXT NOT NULL UNIQUE,
  occurrence  INTEGER NOT NULL REFERENCES occurrence (id),
  decision    TEXT NOT NULL,         -- approve, hold, release
  principal   TEXT NOT NULL,
  channel     TEXT NOT NULL,
  revision    TEXT NOT NULL,
  reason      TEXT,
  at          TEXT NOT NULL,
  expires     TEXT,                  -- null: at NotBefore
  dry_run     INTEGER NOT NULL,
  counts      INTEGER NOT NULL,      -- a vote that still counts, a hold that still holds
  told        TEXT NOT NULL,         -- id of its approval.recorded
  message_id  TEXT                   -- of the AMQP message that brought it
);
CREATE INDEX decision_of_occurrence ON decision (occurrence);
CREATE INDEX decision_that_counts ON decision (occurrence) WHERE counts;

-- Approvals that were granted, and what became of the StartRequest.
CREATE TABLE start_request (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,
  occurrence  INTEGER NOT NULL REFERENCES occurrence (id),
  revision    TEXT NOT NULL,
  rule        TEXT NOT NULL,
  approval_id TEXT NOT NULL,
  granted_at  TEXT NOT NULL,
  state       TEXT NOT NULL,         -- granted, sent (claimed), accepted, failed, refused
  attempts    INTEGER NOT NULL DEFAULT 0,
  status      INTEGER,               -- HTTP status of the last answer
  dry_run     INTEGER NOT NULL,
  cause       TEXT NOT NULL          -- causationid of startrequest.*
);
CREATE INDEX start_request_of_occurrence ON start_request (occurrence);
CREATE INDEX start_request_open ON start_request (state) WHERE state IN ('granted', 'sent');

-- First answers, so that a repeated request gets the same one.
CREATE TABLE answer (
  principal  TEXT NOT NULL,
  request_id TEXT NOT NULL,
  digest     TEXT NOT NULL,          -- of the request's body
  status     INTEGER NOT NULL,
  body       TEXT NOT NULL,
  at         TEXT NOT NULL,
  PRIMARY KEY (principal, request_id)
) WITHOUT ROWID;
CREATE INDEX answer_by_age ON answer (at);

-- One row for each event and each sink that wants it.
CREATE TABLE entry (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,
  sink        TEXT NOT NULL,
  position    INTEGER NOT NULL,      -- of the journal row whose body is sent
  lane        TEXT NOT NULL,         -- entries of one lane go out in order
  type        TEXT NOT NULL,         -- <family>.<change>
  event_key   TEXT,
  not_before  TEXT,                  -- the event's deadline when it was told
  state       TEXT NOT NULL DEFAULT 'waiting',   -- waiting, delivered, superseded, parked
  attempts    INTEGER NOT NULL DEFAULT 0,
  next_at     TEXT,
  reason      TEXT,
  last_status INTEGER,
  recorded    TEXT NOT NULL,
  revived     TEXT,                  -- when an operator last had a dead letter sent again
  settled     TEXT
);
CREATE INDEX entry_waiting ON entry (sink, id) WHERE state = 'waiting';
CREATE INDEX entry_parked ON entry (id) WHERE state = 'parked';
CREATE INDEX entry_of_event ON entry (event_key, id) WHERE event_key IS NOT NULL;
CREATE INDEX entry_settled ON entry (settled) WHERE settled IS NOT NULL;

-- The log of attempts.
CREATE TABLE attempt (
  entry   INTEGER NOT NULL REFERENCES entry (id) ON DELETE CASCADE,
  number  INTEGER NOT NULL,
  at      TEXT NOT NULL,
  took    REAL NOT NULL,             -- seconds
  outcome TEXT NOT NULL,             -- delivered, deferred, parked, error
  status  INTEGER,
  reason  TEXT,
  answer  TEXT,                      -- at most the first KiB
  PRIMARY KEY (entry, number)
) WITHOUT ROWID;

-- Sinks that their receiver or an operator stopped, and those that the file held at the last start.
CREATE TABLE sink (
  name   TEXT PRIMARY KEY,
  state  TEXT NOT NULL,              -- on, paused, disabled
  reason TEXT
) WITHOUT ROWID;
