// Receives webhooks of the relay and prints them (Go 1.22, nothing installed).
// SECRET is the secret of the sink (whsec_…), PORT the port, 8000 by default.

package main

import (
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

var key, _ = base64.StdEncoding.DecodeString(strings.TrimPrefix(os.Getenv("SECRET"), "whsec_"))
var seen sync.Map

func verified(h http.Header, body []byte) bool {
	mac := hmac.New(sha256.New, key)
	fmt.Fprintf(mac, "%s.%s.%s", h.Get("webhook-id"), h.Get("webhook-timestamp"), body)
	mine := "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
	at, err := strconv.ParseInt(h.Get("webhook-timestamp"), 10, 64)
	fits := err == nil && time.Since(time.Unix(at, 0)).Abs() < 5*time.Minute
	for _, given := range strings.Fields(h.Get("webhook-signature")) {
		if fits && hmac.Equal([]byte(given), []byte(mine)) {
			return true
		}
	}
	return false
}

func receive(w http.ResponseWriter, r *http.Request) {
	var event struct{ ID, Type, Subject string }
	body, err := io.ReadAll(r.Body)
	if err != nil || !verified(r.Header, body) || json.Unmarshal(body, &event) != nil {
		w.WriteHeader(401)
		return
	}
	if _, repeated := seen.Load(event.ID); !repeated {
		fmt.Println(event.Type, event.Subject) // your work, or a queue for it
		seen.Store(event.ID, true)             // only now: if the work fails, the relay sends again
	}
	w.WriteHeader(204)
}

func main() {
	http.ListenAndServe("127.0.0.1:"+cmp.Or(os.Getenv("PORT"), "8000"), http.HandlerFunc(receive))
}
