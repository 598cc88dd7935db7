import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.function.Consumer;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.api.BookKeeper;
import org.apache.bookkeeper.client.api.DigestType;
import org.apache.bookkeeper.client.api.LastConfirmedAndEntry;
import org.apache.bookkeeper.client.api.LedgerEntries;
import org.apache.bookkeeper.client.api.LedgerEntry;
import org.apache.bookkeeper.client.api.ReadHandle;
import org.apache.bookkeeper.client.api.WriteHandle;
import org.apache.bookkeeper.conf.ClientConfiguration;

/** Drives Apache BookKeeper: {@code servers} is its metadata service URI. E = Qw = 3, Qa = 2, CRC32C. */
public final class BookKeeperDrive implements Drive.Target {
  private static final byte[] PASSWORD = new byte[0];
  // As much as the product's reader has asked for ahead: four answers of about 512 KiB.
  private static final int READS_AHEAD = 4;
  private static final int ENTRIES_PER_READ = 500;

  private static final long LONG_POLL_MS = 1000;
  private static final long FIRST_ENTRY_RETRY_MS = 10;

  private final String uri;
  private final BookKeeper client;
  private final List<WriteHandle> handles = new ArrayList<>();
  private ReadHandle reader;
  private BookKeeper other;

  private BookKeeperDrive(String uri, int ledgers) throws Exception {
    this.uri = uri;
    client = connect();
    List<CompletableFuture<WriteHandle>> made = new ArrayList<>();
    for (int number = 0; number < ledgers; number++) {
      made.add(create(client));
    }
    for (CompletableFuture<WriteHandle> handle : made) {
      handles.add(handle.get());
    }
  }

  private BookKeeper connect() throws Exception {
    ClientConfiguration configuration = new ClientConfiguration();
    configuration.setMetadataServiceUri(uri);
    configuration.setThrottleValue(0);
    return BookKeeper.newBuilder(configuration).build();
  }

  private static CompletableFuture<WriteHandle> create(BookKeeper by) {
    return by.newCreateLedgerOp()
        .withEnsembleSize(3)
        .withWriteQuorumSize(3)
        .withAckQuorumSize(2)
        .withDigestType(DigestType.CRC32C)
        .withPassword(PASSWORD)
        .execute();
  }

  private static ReadHandle open(BookKeeper by, long id, boolean recovers) throws Exception {
    return by.newOpenLedgerOp()
        .withLedgerId(id)
        .withRecovery(recovers)
        .withDigestType(DigestType.CRC32C)
        .withPassword(PASSWORD)
        .execute()
        .get();
  }

  @Override
  public CompletableFuture<?> add(int ledger, byte[] payload) {
    return handles.get(ledger).appendAsync(payload);
  }

  @Override
  public void beginReading() throws Exception {
    long id = handles.get(0).getId();
    handles.get(0).close();
    reader = open(client, id, false);
  }

  @Override
  public void follow(Consumer<byte[]> seen) throws Exception {
    BookKeeper follower = connect();
    ReadHandle followed = open(follower, handles.get(0).getId(), false);
    Thread thread = new Thread(() -> follow(followed, seen));
    thread.setDaemon(true);
    thread.start();
  }

  /** Follows a ledger by the long poll of the client; what came together is read together. */
  private static void follow(ReadHandle followed, Consumer<byte[]> seen) {
    long next = 0;
    try {
      while (true) {
        try (LastConfirmedAndEntry found =
            followed.readLastAddConfirmedAndEntryAsync(next, LONG_POLL_MS, false).get()) {
          long last = found.getLastAddConfirmed();
          if (found.hasEntry()) {
            seen.accept(found.getEntry().getEntryBytes());
            next++;
          }
          if (last >= next) {
            try (LedgerEntries entries = followed.readAsync(next, last).get()) {
              for (LedgerEntry entry : entries) {
                seen.accept(entry.getEntryBytes());
              }
            }
            next = last + 1;
          }
        } catch (ExecutionException error) {
          // Bookies do not know a ledger before its first entry.
          if (next > 0 || !(error.getCause() instanceof BKException.BKNoSuchLedgerExistsException)) {
            throw error;
          }
          Thread.sleep(FIRST_ENTRY_RETRY_MS);
        }
      }
    } catch (Exception error) {
      error.printStackTrace();
      Runtime.getRuntime().halt(1);
    }
  }

  @Override
  public void prepareTakeover() throws Exception {
    other = connect();
  }

  @Override
  public void takeOver() throws Exception {
    open(other, handles.get(0).getId(), true);
    create(other).get().append(new byte[1]);
  }

  @Override
  public long readAll(long entries) throws Exception {
    ArrayDeque<CompletableFuture<LedgerEntries>> ahead = new ArrayDeque<>();
    long bytes = 0;
    long next = 0;
    while (next < entries || !ahead.isEmpty()) {
      while (next < entries && ahead.size() < READS_AHEAD) {
        long last = Math.min(entries, next + ENTRIES_PER_READ) - 1;
        ahead.add(reader.readAsync(next, last));
        next = last + 1;
      }
      try (LedgerEntries found = ahead.remove().get()) {
        for (LedgerEntry entry : found) {
          bytes += entry.getEntryBytes().length;
        }
      }
    }
    return bytes;
  }

  @Override
  public void close() throws Exception {
    client.close();
  }

  public static void main(String[] arguments) throws Exception {
    Drive.run(arguments, (servers, ledgers, inFlight) -> new BookKeeperDrive(servers, ledgers));
  }
}
