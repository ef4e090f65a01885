// A service that makes room before maintenance: it drains the machines of an event, and then approves it over the same broker.
// The same as drain.py, in Go; text to start from.
//
//	cp ../tests/examples/go.* . && AMQP_URL=amqp://drain:secret@127.0.0.1:5672/ go run drain.go

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"strings"
	"syscall"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	queue  = "drain"
	change = "io.imdsrelay.event."
	// maxBytes is the length of a message id or routing key in AMQP.
	maxBytes = 255
)

var (
	url      = setting("AMQP_URL", "amqp://guest:guest@127.0.0.1:5672/")
	exchange = setting("EXCHANGE", "azure.scheduledevents")
	machines = setting("MACHINES", "*")
)

// Event is what we need of a CloudEvent; see docs/events.md for the rest.
type Event struct {
	ID          string `json:"id"`
	Source      string `json:"source"`
	Type        string `json:"type"`
	Subject     string `json:"subject"`
	Scope       string `json:"scope"`
	CausationID string `json:"causationid"`
	Data        struct {
		EventID     string   `json:"eventId"`
		EventStatus string   `json:"eventStatus"`
		Resources   []string `json:"resources"`
		Revision    string   `json:"revision"`
		Refusal     string   `json:"refusal"`
	} `json:"data"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	for ctx.Err() == nil {
		log.Println(serve(ctx)) // what was not acknowledged comes again
		select {
		case <-ctx.Done():
		case <-time.After(5 * time.Second):
		}
	}
}

func serve(ctx context.Context) error {
	connection, err := amqp.DialConfig(url, amqp.Config{Heartbeat: 10 * time.Second, Properties: amqp.Table{"connection_name": queue}})
	if err != nil {
		return err
	}
	defer connection.Close()
	in, err := connection.Channel()
	if err != nil {
		return err
	}
	out, err := connection.Channel() // a refused publish closes its channel, and is not to take the consumer along
	if err != nil {
		return err
	}
	returned := out.NotifyReturn(make(chan amqp.Return, 1))
	arguments := amqp.Table{"x-queue-type": "quorum", "x-single-active-consumer": true}
	_, err = in.QueueDeclare(queue, true, false, false, false, arguments)
	for _, key := range []string{"event.scheduled.#", "event.updated.#", "approval.refused.#", "startrequest.#"} {
		err = errors.Join(err, in.QueueBind(queue, key, exchange, false, nil))
	}
	if err = errors.Join(err, in.Qos(1, 0, false), out.Confirm(false)); err != nil {
		return err
	}
	messages, err := in.Consume(queue, "", false, false, false, false, nil)
	if err != nil {
		return err
	}
	seen := map[string]bool{} // a real service keeps this where it keeps its results, in one transaction
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case message, open := <-messages:
			if !open {
				return errors.New("the channel was closed")
			}
			var event Event
			if json.Unmarshal(message.Body, &event) != nil || !complete(event) {
				if err = message.Reject(false); err != nil { // taking up again what is no event mends nothing
					return err
				}
				continue
			}
			if key := event.Source + " " + event.ID; !seen[key] {
				if err = handle(ctx, event, out, returned); err != nil {
					return err
				}
				seen[key] = true
			}
			if err = message.Ack(false); err != nil { // only now: until here it would come again
				return err
			}
		}
	}
}

// complete tells whether each field that we use is there, and fits into an approval.
func complete(event Event) bool {
	used := []string{event.Source, event.ID, event.Type}
	if strings.HasPrefix(event.Type, change) {
		used = append(used, event.Scope, event.Data.EventID, event.Data.EventStatus, event.Data.Revision)
		used = append(used, event.Data.Resources...)
	}
	for _, text := range used {
		if text == "" || strings.ContainsRune(text, 0) {
			return false
		}
	}
	return len(queue+"-"+event.ID) <= maxBytes && len("approve."+event.Scope) <= maxBytes
}

func handle(ctx context.Context, event Event, out *amqp.Channel, returned <-chan amqp.Return) error {
	if strings.HasPrefix(event.CausationID, queue+"-") {
		log.Println("answered:", event.Type, event.Subject, event.Data.Refusal)
		return nil
	}
	if !strings.HasPrefix(event.Type, change) || event.Data.EventStatus != "Scheduled" || !ours(event.Data.Resources) {
		return nil
	}
	for _, name := range event.Data.Resources {
		if err := exec.CommandContext(ctx, "true", name).Run(); err != nil { // your work; it must bear being done twice
			return fmt.Errorf("draining %s: %w", name, err)
		}
	}
	if err := approve(ctx, event, out, returned); err != nil {
		return err
	}
	log.Println("drained and approved:", event.Type, event.Subject)
	return nil
}

// ours tells whether the event concerns our machines alone: approving frees all of them.
func ours(names []string) bool {
	for _, name := range names {
		if matched, _ := path.Match(strings.ToLower(machines), strings.ToLower(name)); !matched {
			return false
		}
	}
	return len(names) > 0
}

// approve returns once the decision is in the relay's queue.
func approve(ctx context.Context, event Event, out *amqp.Channel, returned <-chan amqp.Return) error {
	body, err := json.Marshal(map[string]string{
		"eventId": event.Data.EventID, "decision": "approve", "revision": event.Data.Revision, "reason": "drained",
	})
	if err != nil {
		return err
	}
	address, err := amqp.ParseURI(url)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	confirm, err := out.PublishWithDeferredConfirmWithContext(ctx, exchange+".approvals", "approve."+event.Scope, true, false, amqp.Publishing{
		ContentType:  "application/json",
		DeliveryMode: amqp.Persistent,
		MessageId:    queue + "-" + event.ID, // the same for the same state: should we say it twice, it counts once
		UserId:       address.Username,       // the broker checks that we are who we say
		Body:         body,
	})
	if err != nil {
		return err
	}
	if acknowledged, err := confirm.WaitContext(ctx); err != nil || !acknowledged {
		return errors.Join(err, errors.New("the broker did not take the decision"))
	}
	select {
	case back := <-returned: // it comes before the confirm
		return fmt.Errorf("no relay takes decisions for %s: %s", event.Scope, back.ReplyText)
	default:
		return nil
	}
}

func setting(name, otherwise string) string {
	if value, given := os.LookupEnv(name); given {
		return value
	}
	return otherwise
}
