-- The state file. PRAGMA user_version holds the version of this schema, PRAGMA application_id marks the file as ours.

-- Whose file it is and what an operator told it: vm_id, scope, role, mode, last_read; probe, written to see whether it can be.
CREATE TABLE meta (
  key   TEXT PRIMARY KEY,
  value TEXT NOT NULL
) WITHOUT ROWID;

-- The audit trail, and the state of approvals. Append-only: each row's hash covers the row and the hash before it.
CREATE TABLE journal (
  position   INTEGER PRIMARY KEY,
  at         TEXT NOT NULL,          -- RFC 3339
  kind       TEXT NOT NULL,          -- <family>.<change> of the CloudEvent, or claim, answer, mode
  event_key  TEXT,                   -- <eventid>, on a hub <eventid>@<scope>
  transition TEXT,                   -- of event.*: what is counted to make ids
  body       BLOB NOT NULL,          -- the CloudEvent's bytes; of claim, answer and mode a JSON object
  hash       TEXT NOT NULL
);
CREATE INDEX journal_of_event ON journal (event_key, position) WHERE event_key IS NOT NULL;
CREATE INDEX journal_of_approvals ON journal (event_key, position) WHERE kind IN ('approval.granted',
  'approval.recorded', 'approval.reminder', 'approval.voided', 'claim', 'answer', 'startrequest.accepted',
  'startrequest.failed');
CREATE INDEX journal_of_standing_holds ON journal (position)
WHERE kind >= 'standing-hold.' AND kind < 'standing-hold/';
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
  id            INTEGER PRIMARY KEY AUTOINCREMENT,
  scope         TEXT NOT NULL,
  key           TEXT NOT NULL,       -- <eventid>, on a hub <eventid>@<scope>
  number        INTEGER NOT NULL,    -- the first is 1
  position      INTEGER NOT NULL,    -- in the journal, of the event.* with which it began
  data          TEXT NOT NULL,       -- data of event.*, JSON
  revision      TEXT NOT NULL,
  live          INTEGER NOT NULL,
  boot_id       TEXT,                -- of this VM when the event was not yet due nor approved
  first_seen    TEXT NOT NULL,
  last_changed  TEXT NOT NULL,
  outcome       TEXT,
  last_event_id TEXT NOT NULL,       -- of the last event.* that told of it
  UNIQUE (key, number)
);
CREATE UNIQUE INDEX occurrence_live ON occurrence (key) WHERE live;
CREATE INDEX occurrence_of_scope ON occurrence (scope, id);
CREATE INDEX occurrence_ended ON occurrence (last_changed) WHERE NOT live;

-- Answers to accepted requests, so that a request that comes again gets the same one.
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
  id           INTEGER PRIMARY KEY AUTOINCREMENT,
  sink         TEXT NOT NULL,
  position     INTEGER NOT NULL,     -- of the journal row whose body is sent
  ordering_key TEXT NOT NULL,        -- entries with the same key go out in order
  type         TEXT NOT NULL,        -- <family>.<change>
  event_key    TEXT,
  not_before   TEXT,                 -- the event's deadline when it was told
  state        TEXT NOT NULL DEFAULT 'waiting',   -- waiting, delivered, superseded, parked
  attempts     INTEGER NOT NULL DEFAULT 0,
  next_at      TEXT,
  reason       TEXT,
  last_status  INTEGER,
  recorded     TEXT NOT NULL,
  redelivered  TEXT,                 -- when an operator last had a dead letter sent again
  settled      TEXT
);
CREATE INDEX entry_waiting ON entry (sink, id) WHERE state = 'waiting';
CREATE INDEX entry_parked ON entry (id) WHERE state = 'parked';
CREATE INDEX entry_of_event ON entry (event_key, id) WHERE event_key IS NOT NULL;
CREATE INDEX entry_settled ON entry (settled) WHERE settled IS NOT NULL;

-- The log of attempts.
CREATE TABLE attempt (
  entry    INTEGER NOT NULL REFERENCES entry (id) ON DELETE CASCADE,
  number   INTEGER NOT NULL,
  at       TEXT NOT NULL,
  elapsed  REAL NOT NULL,            -- seconds
  outcome  TEXT NOT NULL,            -- delivered, deferred, parked, error
  status   INTEGER,
  reason   TEXT,
  response TEXT,                     -- at most the first KiB
  PRIMARY KEY (entry, number)
) WITHOUT ROWID;

-- Sinks that their receiver or an operator stopped, and those that the file held at the last start.
CREATE TABLE sink (
  name   TEXT PRIMARY KEY,
  state  TEXT NOT NULL,              -- on, paused, disabled
  reason TEXT
) WITHOUT ROWID;

-- One message of a chat sink, about one event or about a burst of them.
CREATE TABLE message (
  id               INTEGER PRIMARY KEY AUTOINCREMENT,
  sink             TEXT NOT NULL,
  ref              TEXT,             -- as the platform names it; null: it was not posted yet, or cannot be named
  content_hash     TEXT,             -- of what it shows; null: it was not posted yet
  is_due           INTEGER NOT NULL DEFAULT 0,   -- whether an entry waits because time alone may have changed it
  history_position INTEGER NOT NULL, -- in the journal, up to which its thread tells
  refresh_at       TEXT              -- when time alone changes what it should show
);
CREATE INDEX message_refresh ON message (sink, refresh_at) WHERE refresh_at IS NOT NULL;

CREATE TABLE message_about (
  sink       TEXT NOT NULL,
  occurrence INTEGER NOT NULL REFERENCES occurrence (id) ON DELETE CASCADE,
  message    INTEGER NOT NULL REFERENCES message (id) ON DELETE CASCADE,
  PRIMARY KEY (sink, occurrence)
) WITHOUT ROWID;
CREATE INDEX message_about_message ON message_about (message);
CREATE INDEX message_about_occurrence ON message_about (occurrence);

-- On a hub: the agents, as they last described themselves.
CREATE TABLE agent (
  scope        TEXT NOT NULL,
  relay        TEXT NOT NULL,        -- the name of the relay as a word of a routing key
  user         TEXT NOT NULL,        -- of RabbitMQ
  name         TEXT NOT NULL,        -- of the relay, as it writes it
  vm_id        TEXT,
  version      TEXT,
  zone         TEXT,
  names        TEXT NOT NULL,        -- JSON: the names by which events refer to this VM
  first_heard  TEXT NOT NULL,
  last_report  TEXT,
  last_pulse   TEXT,
  poll_age     REAL,                 -- seconds, in the last pulse
  clock_offset REAL,                 -- seconds that its clock is ahead of Azure's
  document_at  TEXT,                 -- when it read the last document that was merged, by the clock of IMDS
  PRIMARY KEY (scope, relay)
) WITHOUT ROWID;

-- On a hub: what each agent last said about an event (relay.fleet.hub.merge).
CREATE TABLE sighting (
  event_key TEXT NOT NULL,
  relay     TEXT NOT NULL,           -- the agent; its scope is that of the event
  state     TEXT,                    -- digest of the state; null: the event is gone from the agent's document
  seen      TEXT NOT NULL,           -- when the agent saw this, by the clock of IMDS
  earlier   INTEGER NOT NULL,        -- whether it is about an earlier occurrence
  rebooted  INTEGER NOT NULL,
  gap       INTEGER NOT NULL,
  PRIMARY KEY (event_key, relay)
) WITHOUT ROWID;
CREATE INDEX sighting_of_agent ON sighting (relay, event_key);
