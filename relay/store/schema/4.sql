-- Version 4: the scope of each event. The state file of a hub holds the events of many scopes.

-- On a relay all events have the scope of the file. On a hub the key of an event holds its scope, too.
ALTER TABLE occurrence ADD COLUMN scope TEXT NOT NULL DEFAULT '';
UPDATE occurrence SET scope = (SELECT value FROM meta WHERE key = 'scope');
CREATE INDEX occurrence_of_scope ON occurrence (scope, id);

-- On a hub: the agents, as they last described themselves.
CREATE TABLE agent (
  scope        TEXT NOT NULL,
  relay        TEXT NOT NULL,        -- the name of the relay as a word of a routing key
  user         TEXT NOT NULL,        -- of RabbitMQ
  name         TEXT NOT NULL,        -- of the relay, as it writes it
  vm_id        TEXT,
  boot_id      TEXT,
  version      TEXT,
  zone         TEXT,
  names        TEXT NOT NULL,        -- JSON: the names by which events refer to this VM
  first_heard  TEXT NOT NULL,
  last_report  TEXT,
  last_pulse   TEXT,
  poll_age     REAL,                 -- seconds, in the last pulse
  clock_offset REAL,                 -- seconds that its clock is ahead of Azure's
  PRIMARY KEY (scope, relay)
) WITHOUT ROWID;

-- On a hub: what each agent last said about an event (relay.fleet.hub.merge).
CREATE TABLE sighting (
  event_key TEXT NOT NULL,
  relay     TEXT NOT NULL,           -- the agent; its scope is that of the event
  state     TEXT,                    -- digest of the state; null: the event is gone from the agent's document
  place     INTEGER NOT NULL,        -- which of the states that were told the agent has reached
  at        TEXT NOT NULL,           -- when the agent saw this, by its clock
  seen      TEXT NOT NULL,           -- the same by Azure's clock, estimated
  rebooted  INTEGER NOT NULL,
  gap       INTEGER NOT NULL,
  PRIMARY KEY (event_key, relay)
) WITHOUT ROWID;
CREATE INDEX sighting_of_agent ON sighting (relay, event_key);

-- The events that ended a short while ago are found however many ended before (approvals.limits).
CREATE INDEX occurrence_ended ON occurrence (last_changed) WHERE NOT live;
